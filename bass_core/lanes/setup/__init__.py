"""What happens before a lane's first step: arguments are checked, models warmed up and decoders built."""

"""What happens before a lane's first step: arguments are looked at, models warmed, decoders built."""

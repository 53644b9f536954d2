"""What rounds would cost on other hardware: datasheets, model shapes, rooflines, and rounds played on paper."""

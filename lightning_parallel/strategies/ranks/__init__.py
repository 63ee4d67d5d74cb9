"""Messages of the host between ranks: agreement, signals, failure."""

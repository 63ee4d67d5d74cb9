"""What ranks tell each other: agreement, signals, failure."""

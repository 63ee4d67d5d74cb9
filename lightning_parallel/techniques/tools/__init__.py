"""What several techniques use."""

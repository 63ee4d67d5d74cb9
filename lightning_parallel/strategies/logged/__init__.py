"""What a step logs, keeps and measures, as one device would."""

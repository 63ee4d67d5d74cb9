"""The ways to divide training. A technique is a small frozen dataclass: its fields are its whole configuration."""

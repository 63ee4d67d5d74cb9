"""The user's module of which a rank holds a part."""

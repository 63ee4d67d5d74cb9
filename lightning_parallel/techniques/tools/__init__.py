"""Tools that several techniques use."""

"""Models that are never whole in memory: built on meta, made part by part."""

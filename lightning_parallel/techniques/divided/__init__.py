"""The `Divided` tensor, which computes as the full tensor on a rank's local shard, and the rules of its operations."""

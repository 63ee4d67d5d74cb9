"""Lightning's objects that run techniques. Only here is Lightning imported."""

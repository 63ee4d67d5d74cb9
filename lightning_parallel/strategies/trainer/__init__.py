"""Lightning's Trainer: what a run changes of it, and its private fields."""

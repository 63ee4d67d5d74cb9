"""What a step keeps on its module for a batch that runs in parts."""

"""Pipeline parallel: ranks hold different layers of the model and pass microbatches from one to the next."""

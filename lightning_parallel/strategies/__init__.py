"""Lightning strategies that run techniques. No other subpackage imports Lightning."""

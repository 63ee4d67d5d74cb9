"""Values that a step logs, keeps in attributes or measures: the same as on one device."""

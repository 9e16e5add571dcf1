"""The life of one container: launch, output, exit, kill of the tree, evidence."""

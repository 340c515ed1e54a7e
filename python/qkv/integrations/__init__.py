"""Other projects' tools on this engine. Each module needs that tool; none is imported unasked."""

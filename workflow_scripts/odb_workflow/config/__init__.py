"""The configuration: its schema, how it is read and merged, and its generated documents."""

"""How families write reasoning, text and calls: one file a format, with the grammar of an answer and its reader."""

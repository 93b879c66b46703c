"""How families write what they think, say and call: the grammar of an answer, and what reads it; a file for each format."""

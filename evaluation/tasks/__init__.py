"""Tasks: their JSON files, readers of published formats, rows and labels."""

"""What every part may use: errors for people, the console, files written whole or not at all."""

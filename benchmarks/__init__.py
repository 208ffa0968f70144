"""What compression costs and saves: measured side by side on emulated links. See README.md."""

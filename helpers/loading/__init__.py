"""Loading: datasets over files, packed formats, images resized ahead, and what goes wrong with worker processes."""

"""What the notebooks of this course share. Each module is one room with one job."""

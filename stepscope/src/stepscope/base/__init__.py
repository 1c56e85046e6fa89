"""What all of stepscope stands on: numbers as text, files that appear whole, how sure a mean is, this machine."""

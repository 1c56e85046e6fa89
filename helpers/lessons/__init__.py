"""What the lessons need around them: the machine checked, answers checked, a faulty script graded, notebooks run."""

"""Results: the scoreboard, recorded references, and the rungs of the ladder."""

"""How a suite is run: its failures once more and alone, and what each file took of the processors."""

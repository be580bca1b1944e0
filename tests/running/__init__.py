"""How a suite is run: side by side, its failures once more and alone, and what each file took of the processors."""

"""What an operation is: the vocabulary of steps, bound steps and their geometry."""

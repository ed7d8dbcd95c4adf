"""What a user asks for: problem files, their parameters, a call's arguments, and the operator that they make."""

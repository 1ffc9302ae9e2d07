"""What a teacher says at the student's tokens, and which of it counts. Pure, but for what asks an engine that it is given."""

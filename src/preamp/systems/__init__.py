"""What other systems do: their rules, their saved formats, and DeepSpeed's configuration."""

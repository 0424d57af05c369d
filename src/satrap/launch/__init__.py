"""`satrap run`: servers, workers and trainers as processes that one supervisor starts and restarts."""

-- Whose operators did it: null where it was done for every group.

ALTER TABLE messaging_actions ADD COLUMN group_id TEXT;
ALTER TABLE messaging_jobs ADD COLUMN group_id TEXT;

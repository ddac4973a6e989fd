-- Until when retention has in fact removed things: an event of before, which nobody remembers, may have been dealt with,
-- however long things are kept by now. Null while nothing was.
ALTER TABLE messaging_forgotten ADD COLUMN removed_until timestamptz;

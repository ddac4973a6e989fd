-- Until when retention has removed things for good: whoever asks whether something is missing asks of later ones only.
CREATE TABLE messaging_forgotten (
    what  TEXT    NOT NULL PRIMARY KEY CHECK (what IN ('events', 'verdicts', 'letters')),
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
-- What went before this table was there is not known.
INSERT INTO messaging_forgotten (what, until)
SELECT value, CAST(unixepoch('subsec') * 1000 AS INTEGER) FROM json_each('["events", "verdicts", "letters"]');

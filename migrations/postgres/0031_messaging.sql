-- Until when retention has removed things for good: whoever asks whether something is missing asks of later ones only.
CREATE TABLE messaging_forgotten (
    what  text        NOT NULL PRIMARY KEY CHECK (what IN ('events', 'verdicts', 'letters')),
    until timestamptz NOT NULL
);
-- What went before this table was there is not known.
INSERT INTO messaging_forgotten (what, until) SELECT what, now() FROM unnest(ARRAY['events', 'verdicts', 'letters']) AS what;

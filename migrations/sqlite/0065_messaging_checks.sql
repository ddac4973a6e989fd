-- A CHECK with IN has SQLite build a table of all it names for each row that is written; comparing with one after the
-- other takes a fraction of that. What a CHECK says can be changed only where SQLite keeps the schema; no row is
-- touched. The view comes and goes so that connections which are open read the schema anew.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql,
    'kind IN (''event'', ''retry'', ''redrive'', ''replay'')',
    'kind = ''event'' OR kind = ''retry'' OR kind = ''redrive'' OR kind = ''replay''')
WHERE name = 'messaging_outbox';
UPDATE sqlite_schema SET sql = replace(sql,
    'status IN (''pending'', ''published'', ''failed'', ''dead'')',
    'status = ''published'' OR status = ''pending'' OR status = ''failed'' OR status = ''dead''')
WHERE name = 'messaging_outbox';
UPDATE sqlite_schema SET sql = replace(sql,
    'state IN (''processing'', ''processed'', ''waiting'', ''retrying'', ''dead'')',
    'state = ''processed'' OR state = ''processing'' OR state = ''waiting'' OR state = ''retrying'' OR state = ''dead''')
WHERE name = 'messaging_inbox';
PRAGMA writable_schema = RESET;
CREATE VIEW messaging_anew AS SELECT 1;
DROP VIEW messaging_anew;

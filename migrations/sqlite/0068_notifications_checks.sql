-- The choices of a CHECK one by one: see 0065.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql,
    'kind IN (''reserved'', ''rejected'', ''paid'', ''cancelled'', ''expired'')',
    'kind = ''reserved'' OR kind = ''rejected'' OR kind = ''paid'' OR kind = ''cancelled'' OR kind = ''expired''')
WHERE name = 'notifications_notices';
UPDATE sqlite_schema SET sql = replace(sql,
    'state IN (''pending'', ''sending'', ''sent'', ''failed'', ''unknown'')',
    'state = ''sent'' OR state = ''sending'' OR state = ''pending'' OR state = ''failed'' OR state = ''unknown''')
WHERE name = 'notifications_notices';
PRAGMA writable_schema = RESET;
CREATE VIEW notifications_anew AS SELECT 1;
DROP VIEW notifications_anew;

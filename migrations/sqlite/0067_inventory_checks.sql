-- The choices of a CHECK one by one: see 0065.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql,
    'state IN (''held'', ''committed'', ''fulfilled'', ''released'')',
    'state = ''held'' OR state = ''committed'' OR state = ''fulfilled'' OR state = ''released''')
WHERE name = 'inventory_reservations';
PRAGMA writable_schema = RESET;
CREATE VIEW inventory_anew AS SELECT 1;
DROP VIEW inventory_anew;

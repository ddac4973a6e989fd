-- The choices of a CHECK one by one: see 0065.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql,
    'status IN (''placed'', ''reserved'', ''rejected'', ''paid'', ''cancelled'', ''expired'', ''fulfilled'')',
    'status = ''placed'' OR status = ''reserved'' OR status = ''rejected'' OR status = ''paid''
            OR status = ''cancelled'' OR status = ''expired'' OR status = ''fulfilled''')
WHERE name = 'orders_orders';
PRAGMA writable_schema = RESET;
CREATE VIEW orders_anew AS SELECT 1;
DROP VIEW orders_anew;

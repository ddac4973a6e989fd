//! The walls: who may know whom, who may commit, and that both databases are served alike.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const MIGRATIONS: [&str; 2] = ["crates/kernel/migrations", "migrations"];
const MODULES: [&str; 4] = ["orders", "inventory", "notifications", "ledger"];

/// Which parts of the two packages each part may name, beside itself. `main → app → modules, operations → {http,
/// messaging} → db`; `clock`, `money` and `numbers` are for all. A module may also name another's `events`.
const MAY_NAME: [(&str, &[&str]); 22] = [
    ("access", &["clock", "db", "secrets"]),
    ("crash_points", &[]),
    ("clock", &[]),
    ("numbers", &[]),
    ("secrets", &[]),
    ("telemetry", &["secrets", "trace"]),
    ("lifecycle", &[]),
    ("db", &["clock", "crash_points", "metrics"]),
    ("messaging", &["clock", "crash_points", "db", "metrics", "secrets", "trace"]),
    ("http", &["access", "clock", "db", "messaging", "metrics", "trace"]),
    ("config", &["access", "clock", "db", "http", "messaging", "schema", "secret_files", "secrets", "telemetry"]),
    ("schema", &["db"]),
    ("secret_files", &["secrets"]),
    ("metrics", &[]),
    ("money", &[]),
    ("trace", &[]),
    ("operations", &["access", "clock", "db", "http", "messaging", "metrics", "money", "trace"]),
    ("orders", &["clock", "db", "http", "messaging", "numbers", "trace"]),
    ("inventory", &["clock", "db", "http", "messaging", "numbers"]),
    ("notifications", &["clock", "db", "http", "messaging", "numbers"]),
    ("ledger", &["clock", "db", "http", "messaging", "numbers"]),
    ("lib", &[]),
];

/// Where a transaction may be committed: by handlers, by loops, and where a transaction is made.
const MAY_COMMIT: [&str; 18] = [
    "app.rs",
    "db/migrate.rs",
    "db/mod.rs",
    "http/session.rs",
    "messaging/consumer/batch.rs",
    "messaging/consumer/mod.rs",
    "messaging/jobs/runner.rs",
    "messaging/resync.rs",
    "messaging/instances.rs",
    "messaging/office.rs",
    "messaging/outside.rs",
    "messaging/relay.rs",
    "messaging/retention/mod.rs",
    "messaging/transport/table/",
    "messaging/waiting/mod.rs",
    "operations/",
    "orders/desk.rs",
    "orders/expiry.rs",
];

/// A source file: its path below `src`, the part it belongs to, and its lines without comments.
struct Source {
    path: String,
    part: String,
    code: String,
}

fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    for package in ["src", "crates/kernel/src"] {
        let folder = Path::new(ROOT).join(package);
        walk(&folder, &mut |path, text| {
            let path = path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned();
            let part = path.split(['/', '.']).next().unwrap().to_owned();
            found.push(Source { path, part, code: without_comments(text) });
        });
    }
    assert!(found.len() > 40, "the sources are where they are looked for");
    found
}

fn walk(folder: &Path, visit: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, visit);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "sql") {
            visit(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}

fn without_comments(text: &str) -> String {
    let code = |line: &&str| !line.trim_start().starts_with("//");
    text.lines().filter(code).map(|line| line.split(" // ").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Unit tests come last in a file.
fn without_tests(code: &str) -> &str {
    code.split("#[cfg(test)]\nmod tests").next().unwrap()
}

/// What follows each `crate::` and `stockade_kernel::`: the part named and, if there is one, the next segment.
fn names(code: &str) -> BTreeSet<(String, String)> {
    let mut names = BTreeSet::new();
    for rest in code.replace("stockade_kernel::", "crate::").split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(group) => names.extend(entries_of(group).into_iter().map(path_of)),
            None => {
                names.insert(path_of(rest));
            }
        }
    }
    names
}

/// The entries of a list, up to the brace that ends it; one that is a list itself is one entry.
fn entries_of(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut entries) = (0, 0, Vec::new());
    for (place, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            '}' | ',' if depth == 0 => {
                entries.push(list[start..place].trim());
                start = place + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    entries.retain(|entry| !entry.is_empty());
    entries
}

fn path_of(text: &str) -> (String, String) {
    let mut segments = text.trim_start().split("::").map(|segment| {
        let end = segment.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(segment.len());
        (segment[..end].to_owned(), end == segment.len())
    });
    let (first, goes_on) = segments.next().unwrap();
    let second = if goes_on { segments.next().map(|(name, _)| name).unwrap_or_default() } else { String::new() };
    (first, second)
}

/// Names of functions declared with `prefix`, as in `pub async fn `.
fn functions(code: &str, prefix: &str) -> BTreeSet<String> {
    code.split(prefix).skip(1).map(|rest| rest.split(['(', '<']).next().unwrap().to_owned()).collect()
}

/// The tables of one side's migrations, each with the module whose file creates it.
fn tables(side: &str) -> BTreeMap<String, String> {
    let mut tables = BTreeMap::new();
    for folder in MIGRATIONS {
        walk(&Path::new(ROOT).join(folder).join(side), &mut |path, sql| {
            let stem = path.file_stem().unwrap().to_str().unwrap();
            let module = stem.split_once('_').unwrap().1.to_owned();
            for created in sql.split("CREATE TABLE ").skip(1) {
                let name = created.split([' ', '(']).next().unwrap().to_owned();
                tables.insert(name, module.clone());
            }
        });
    }
    tables
}

fn words(code: &str) -> BTreeSet<&str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| word.contains('_')).collect()
}

#[test]
fn the_reader_of_sources_sees_what_it_should() {
    let code = without_comments(
        "use crate::orders::store::Query; // crate::gone\n/// crate::gone too\nuse crate::{http::{a, b}, db::Tx,\n ledger};",
    );
    let seen = names(&code);
    let expected = [("db", "Tx"), ("http", ""), ("ledger", ""), ("orders", "store")];
    assert_eq!(seen, expected.map(|(part, next)| (part.to_owned(), next.to_owned())).into());
    assert_eq!(functions("pub async fn a(c: &mut C) {}\npub async fn b<T>(t: T) {}", "pub async fn ").len(), 2);
    assert_eq!(words("SELECT x FROM orders_lines l"), ["orders_lines"].into());
    assert_eq!(without_tests("fn a() {}\n#[cfg(test)]\nmod tests {}"), "fn a() {}\n");
}

#[test]
fn each_part_names_only_what_is_below_it() {
    for source in sources() {
        if ["app", "main", "cli"].contains(&source.part.as_str()) {
            continue; // the composition root knows everything
        }
        let (_, allowed) = MAY_NAME
            .iter()
            .find(|(part, _)| *part == source.part)
            .unwrap_or_else(|| panic!("what is {}?", source.path));
        for (part, next) in names(&source.code) {
            let events =
                MODULES.contains(&source.part.as_str()) && MODULES.contains(&part.as_str()) && next == "events";
            let is_macro = ["on", "migrations"].contains(&part.as_str());
            assert!(
                part == source.part || is_macro || allowed.contains(&part.as_str()) || events,
                "{} names crate::{part}::{next}",
                source.path
            );
        }
        assert!(!source.code.contains("super::super::"), "{}: say crate:: instead", source.path);
    }
}

#[test]
fn the_kernel_knows_no_http() {
    for source in sources().iter().filter(|source| ["db", "messaging"].contains(&source.part.as_str())) {
        for word in ["axum", "hyper", "tower"] {
            assert!(!source.code.contains(&format!("{word}::")), "{} names {word}", source.path);
        }
    }
}

#[test]
fn models_are_pure() {
    let models: Vec<Source> = sources().into_iter().filter(|source| source.path.ends_with("/model.rs")).collect();
    assert_eq!(models.len(), MODULES.len());
    for model in models {
        for word in ["sqlx", "tokio", "axum", "crate::db", "outbox", "transport", "async ", ".await", "SystemTime"] {
            assert!(!model.code.contains(word), "{} has {word:?}", model.path);
        }
    }
}

#[test]
fn a_table_is_named_only_by_its_own_module() {
    let tables = tables("sqlite");
    // The bench, the audit and the timeline are auditors: they ask every table whether the promises were kept.
    let auditors = ["cli/bench", "operations/audit/", "operations/timeline/"];
    for source in sources().iter().filter(|source| !auditors.iter().any(|place| source.path.starts_with(place))) {
        for word in words(&source.code) {
            if let Some(owner) = tables.get(word) {
                assert_eq!(owner, &source.part, "{} names {word}", source.path);
            }
        }
    }
}

#[test]
fn only_owners_commit() {
    for source in sources().iter().filter(|source| without_tests(&source.code).contains(".commit()")) {
        let owner = MAY_COMMIT.iter().any(|place| source.path.starts_with(place));
        let handler = source.path.ends_with("/http.rs");
        assert!(owner || handler || source.part == "cli", "{} commits; it should borrow", source.path);
    }
}

#[test]
fn dialects_are_told_apart_only_at_the_seam() {
    // The bench measures the databases, so it may know which one it looks at.
    let seam = |source: &&Source| source.part == "db" || source.path.starts_with("cli/bench/");
    for source in sources().iter().filter(|source| !seam(source)) {
        assert!(!source.code.contains("Conn::"), "{} tells the databases apart", source.path);
        let twin = source.path.ends_with("/pg.rs") || source.path.ends_with("/sqlite.rs");
        for word in ["PgConnection", "SqliteConnection"] {
            assert!(twin || !source.code.contains(word), "{} names {word}", source.path);
        }
    }
}

#[test]
fn twin_files_have_the_same_functions() {
    let sources: BTreeMap<String, String> = sources().into_iter().map(|source| (source.path, source.code)).collect();
    let mut twins = 0;
    for (path, code) in &sources {
        let Some(folder) = path.strip_suffix("pg.rs") else { continue };
        let twin = &sources[&format!("{folder}sqlite.rs")];
        let (pg, sqlite) = (functions(code, "pub async fn "), functions(twin, "pub async fn "));
        assert_eq!(pg, sqlite, "{folder}");
        let declared = functions(&sources[&format!("{folder}mod.rs")], "async fn ");
        assert!(pg.is_subset(&declared), "{folder}: each is declared by dialects!");
        twins += 1;
    }
    assert_eq!(sources.keys().filter(|path| path.ends_with("/sqlite.rs")).count(), twins);
    assert!(twins >= 5, "{twins}");
}

#[test]
fn migrations_are_twins_and_their_tables_carry_their_modules_name() {
    let names = |folder: &str, side: &str| -> BTreeSet<String> {
        let files = fs::read_dir(Path::new(ROOT).join(folder).join(side)).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    };
    for folder in MIGRATIONS {
        assert_eq!(names(folder, "postgres"), names(folder, "sqlite"), "{folder}");
    }
    let (postgres, sqlite) = (tables("postgres"), tables("sqlite"));
    assert_eq!(postgres, sqlite);
    assert!(sqlite.len() >= 14, "{sqlite:?}");
    for (table, module) in sqlite {
        assert!(table.starts_with(&format!("{module}_")), "{table} of {module}");
    }
}

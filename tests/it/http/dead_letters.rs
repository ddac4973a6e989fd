//! What an operator does about dead letters: groups, discarding, restoring, and the record of it all.

use serde_json::{Value, json};
use stockade_kernel::clock::Clock;

use crate::support::{App, TestDb, each_database, fields, problem, wrong_field};

const GROUP_FIELDS: [&str; 7] = ["consumer", "count", "event_type", "first_seen_at", "last_seen_at", "queue", "reason"];
const ACTION_FIELDS: [&str; 8] = ["action", "created_at", "details", "id", "request_id", "subject", "who", "why"];

/// Files `count` letters that nobody can read, and returns the newest of them.
async fn poison(app: &App, queue: &str, body: &str, count: usize) -> Value {
    app.tell("/v1/lab/publish", &json!({ "queue": queue, "body": body, "times": count })).await;
    app.eventually_list(&format!("/v1/dead-letters?queue={queue}&limit=200"), count).await.remove(0)
}

fn path(letter: &Value, verb: &str) -> String {
    format!("/v1/dead-letters/{}/{verb}", letter["id"].as_str().unwrap())
}

async fn letters_are_grouped_by_what_is_likely_to_be_one_cause(db: TestDb) {
    let app = App::start(&db).await;
    poison(&app, "inventory", "no JSON", 3).await;
    let letter = poison(&app, "notifications", "{}", 1).await;
    let groups = app.read("/v1/dead-letters/groups").await;
    assert_eq!(fields(&groups), ["data", "next_cursor"]);
    let groups = groups["data"].as_array().unwrap().clone();
    assert_eq!(fields(&groups[0]), GROUP_FIELDS);
    let seen: Vec<_> = groups.iter().map(|group| (&group["consumer"], &group["reason"], &group["count"])).collect();
    assert_eq!(
        seen,
        [(&json!("inventory"), &json!("not-json"), &json!(3)), (&json!("notifications"), &json!("no-id"), &json!(1))],
        "the largest first"
    );
    assert!(groups[0]["first_seen_at"].as_str() <= groups[0]["last_seen_at"].as_str());
    assert_eq!(groups[1]["first_seen_at"], letter["created_at"]);
    for (filter, count) in [
        ("reason=not-json", 1),
        ("queue=notifications", 1),
        ("consumer=orders", 0),
        ("state=redriven", 0),
        ("from=2100-01-01T00:00:00Z", 0),
        ("to=2100-01-01T00:00:00Z", 2),
    ] {
        let found = app.read(&format!("/v1/dead-letters/groups?{filter}")).await;
        assert_eq!(found["data"].as_array().unwrap().len(), count, "{filter}");
    }
    problem(app.get("/v1/dead-letters/groups?state=lost").send().await.unwrap(), 400, "bad-filter").await;
    app.stop().await;
}

async fn a_discarded_letter_can_be_restored_and_every_step_is_recorded(db: TestDb) {
    let app = App::start(&db).await;
    let letter = poison(&app, "inventory", "no JSON", 1).await;
    problem(app.post(&path(&letter, "restore"), &json!({})).send().await.unwrap(), 409, "already-open").await;
    for (body, pointer) in [(json!({}), ""), (json!({ "reason": "  " }), "/reason")] {
        wrong_field(app.post(&path(&letter, "discard"), &body).send().await.unwrap(), pointer).await;
    }
    let discard =
        app.post(&path(&letter, "discard"), &json!({ "reason": "a test of ours" })).header("x-operator", "alice");
    let discarded: Value = discard.send().await.unwrap().json().await.unwrap();
    assert_eq!((&discarded["state"], &discarded["id"]), (&json!("discarded"), &letter["id"]));
    for verb in ["discard", "redrive"] {
        let again = app.post(&path(&letter, verb), &json!({ "reason": "again" })).send().await.unwrap();
        problem(again, 409, "already-discarded").await;
    }
    assert_eq!(app.read("/v1/queues/inventory").await["dead_letters"], 0, "it is open no longer");

    let restored = app.client.post(format!("{}{}", app.url, path(&letter, "restore"))).send().await.unwrap();
    assert_eq!(restored.status(), 200, "a body may be left out");
    let restored: Value = restored.json().await.unwrap();
    assert_eq!(restored["state"], "open");
    app.tell(&path(&letter, "redrive"), &json!({ "reason": "mended" })).await;
    problem(app.post(&path(&letter, "restore"), &json!({})).send().await.unwrap(), 409, "already-redriven").await;

    let subject = letter["id"].as_str().unwrap();
    let done = app.walk(&format!("/v1/actions?subject={subject}&limit=1")).await;
    assert_eq!(fields(&done[0]), ACTION_FIELDS);
    let steps: Vec<_> = done.iter().map(|done| (&done["action"], &done["who"], &done["why"])).collect();
    assert_eq!(
        steps,
        [
            (&json!("dead-letter.redrive"), &json!("anonymous"), &json!("mended")),
            (&json!("dead-letter.restore"), &json!("anonymous"), &Value::Null),
            (&json!("dead-letter.discard"), &json!("alice"), &json!("a test of ours")),
        ],
        "newest first, and what was refused is not there"
    );
    assert_eq!(app.read(&path(&letter, "")[..path(&letter, "").len() - 1]).await["actions"], json!(done));
    assert_eq!(app.walk("/v1/actions?who=alice").await.len(), 1);
    app.tell("/v1/consumers/orders/pause", &json!({})).await;
    let pause = &app.read("/v1/actions?action=consumer.pause").await["data"][0];
    assert_eq!(pause["subject"], "orders");
    app.stop().await;
}

/// While a letter lies discarded, another copy of its event may be rejected.
async fn a_letter_whose_event_has_a_newer_open_letter_stays_discarded(db: TestDb) {
    let app = App::start(&db).await;
    let order = app.place("alice", &[("NOWHERE", 1)]).await;
    let id = order["id"].as_str().unwrap();
    let body = db.event_body(id, "order.placed").await;
    app.eventually_list("/v1/notifications", 1).await;
    // The same id with another body: put aside, each delivery by itself.
    let other = body.replacen("NOWHERE", "ELSEWHERE", 1);
    let letter = poison(&app, "inventory", &other, 1).await;
    assert_eq!(letter["reason"], "id-reused");
    app.tell(&path(&letter, "discard"), &json!({ "reason": "a forgery" })).await;
    app.tell(&path(&letter, "restore"), &json!({})).await;
    app.tell(&path(&letter, "discard"), &json!({ "reason": "a forgery" })).await;
    app.stop().await;
    // As if another delivery had been filed under the same key meanwhile.
    let opened = db.open(Clock::System).await;
    let mut tx = opened.begin().await.unwrap();
    stockade_kernel::on!(tx, c => sqlx::query(
        "INSERT INTO messaging_dead_letters (id, queue, consumer, reason, error, attempts, headers, body, x_death, state,
             filing_key, delivery_key, created_at, updated_at)
         SELECT $1, queue, consumer, reason, error, attempts, headers, body, x_death, 'open', filing_key, 'another',
             created_at, updated_at FROM messaging_dead_letters",
    ).bind(stockade_kernel::clock::mint_id()).execute(c).await.map(drop)).unwrap();
    tx.commit().await.unwrap();
    opened.close().await;
    drop(opened);
    let app = App::start(&db).await;
    problem(app.post(&path(&letter, "restore"), &json!({})).send().await.unwrap(), 409, "open-anew").await;
    app.stop().await;
}

/// Nothing that is kept of a message is read to list it.
async fn a_letter_that_cannot_be_decoded_hides_no_other(db: TestDb) {
    let app = App::start(&db).await;
    poison(&app, "inventory", "no JSON", 2).await;
    app.stop().await;
    let opened = db.open(Clock::System).await;
    let mut tx = opened.begin().await.unwrap();
    stockade_kernel::on!(tx, c => sqlx::query(
        "UPDATE messaging_dead_letters SET headers = 'torn', x_death = '{', event_type = 'torn.too'
         WHERE id = (SELECT id FROM messaging_dead_letters ORDER BY id LIMIT 1)",
    ).execute(c).await.map(drop))
    .unwrap();
    tx.commit().await.unwrap();
    opened.close().await;
    drop(opened);
    let app = App::start(&db).await;
    let letters = app.walk("/v1/dead-letters?limit=1").await;
    assert_eq!(letters.len(), 2);
    let torn = app.read(&format!("/v1/dead-letters/{}", letters[1]["id"].as_str().unwrap())).await;
    assert_eq!((&torn["body"], &torn["headers"], &torn["x_death"]), (&json!("no JSON"), &Value::Null, &Value::Null));
    assert_eq!(app.read("/v1/dead-letters/groups").await["data"].as_array().unwrap().len(), 2);
    app.tell(&path(&torn, "redrive"), &json!({})).await;
    app.stop().await;
}

each_database!(
    letters_are_grouped_by_what_is_likely_to_be_one_cause,
    a_discarded_letter_can_be_restored_and_every_step_is_recorded,
    a_letter_whose_event_has_a_newer_open_letter_stays_discarded,
    a_letter_that_cannot_be_decoded_hides_no_other,
);

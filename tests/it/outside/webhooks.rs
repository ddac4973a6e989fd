//! Notices by webhook.

use std::time::Duration;

use serde_json::{Value, json};
use stockade::notifications::channels::Key;

use super::{
    SECRET, by_webhook, by_webhook_at_leisure, inbox_row, until_inbox, until_letter, until_notice, until_sent,
};
use crate::support::{App, Reply, TestDb, Webhooks, each_database, each_database_on_rabbit, eventually};

each_database!(
    a_notice_is_posted_signed_and_only_once,
    a_notice_on_its_way_shows_and_holds_nothing_up,
    a_receiver_that_fails_is_tried_again_until_it_is_a_dead_letter,
    a_refusal_is_final,
    a_receiver_that_asks_for_time_gets_it,
    no_answer_in_time_is_unknown_and_left_alone_if_told_so,
    no_answer_in_time_is_unknown_until_the_repeat_is_answered,
    a_doubt_stays_though_later_attempts_fail,
    a_receiver_that_is_away_has_surely_got_nothing,
    calls_are_made_at_once_but_not_too_many,
    the_log_takes_over_what_another_channel_left,
);

each_database_on_rabbit!(
    a_notice_is_posted_signed_and_only_once,
    a_receiver_that_fails_is_tried_again_until_it_is_a_dead_letter,
);

async fn a_notice_is_posted_signed_and_only_once(db: TestDb) {
    let receiver = Webhooks::open([]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.until_connected().await;
    let order = app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let (notice, row) = until_sent(&app).await;
    assert_eq!((&notice["channel"], &notice["last_error"]), (&json!("webhook"), &Value::Null));
    assert_eq!((&row["attempts"], &row["fenced"]), (&json!(1), &json!(0)));
    assert!(row["finished_at"].as_str().unwrap() >= row["started_at"].as_str().unwrap());

    let posted = receiver.until_posted(1).await.remove(0);
    assert_eq!(posted.key(), notice["event_id"].as_str().unwrap(), "the event's id tells repeats");
    assert_eq!(posted.header("webhook-id"), posted.key());
    assert_eq!(posted.header("content-type"), "application/json");
    let timestamp = posted.header("webhook-timestamp").parse().unwrap();
    let signature = Key::read(SECRET).unwrap().sign(posted.key(), timestamp, &posted.body);
    assert_eq!(posted.header("webhook-signature"), signature);
    let body = posted.json();
    assert_eq!((&body["order_id"], &body["kind"]), (&order["id"], &json!("reserved")));
    assert_eq!(body["correlation_id"], order["correlation_id"]);
    assert_eq!(body["payload"]["order_id"], order["id"]);

    // The same event once more, as a broker may deliver it.
    let event = db.event_body(order["id"].as_str().unwrap(), "inventory.reserved").await;
    app.tell("/v1/lab/publish", &json!({ "queue": "notifications", "body": event, "times": 3 })).await;
    eventually("three duplicates", async || (inbox_row(&app, &notice).await["duplicates"] == 3).then_some(())).await;
    receiver.until_posted(1).await;
    app.stop().await;
}

async fn a_notice_on_its_way_shows_and_holds_nothing_up(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    receiver.until_posted(1).await;
    let notice = until_notice(&app, "sending").await;
    let row = inbox_row(&app, &notice).await;
    assert_eq!((&row["state"], &row["attempts"], &row["finished_at"]), (&json!("processing"), &json!(1), &Value::Null));
    assert_eq!(app.read("/v1/inbox?state=processing").await["data"].as_array().unwrap().len(), 1);
    // No transaction is open over the call: others write as ever, even where there is one writer.
    app.place_and_wait("bob", &[("WIDGET-A", 1)]).await;
    receiver.let_go();
    app.eventually_list("/v1/notifications?state=sent", 2).await;
    let row = until_inbox(&app, &notice, "processed").await;
    assert_eq!(row["attempts"], 1);
    assert!(row["finished_at"].is_string());
    app.stop().await;
}

async fn a_receiver_that_fails_is_tried_again_until_it_is_a_dead_letter(db: TestDb) {
    let receiver = Webhooks::open([500, 503, 500].map(Reply::Status)).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &["--retry-max", "3"])).await;
    app.until_connected().await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let letter = until_letter(&app).await;
    assert_eq!((&letter["reason"], &letter["attempts"]), (&json!("retries-exhausted"), &json!(3)));
    let error = letter["error"].as_str().unwrap();
    assert!(error.contains("500") && error.contains("said the receiver"), "{error}");
    let notice = until_notice(&app, "failed").await;
    assert_eq!(notice["last_error"], letter["error"]);
    let row = inbox_row(&app, &notice).await;
    assert_eq!((&row["state"], &row["attempts"]), (&json!("dead"), &json!(3)));
    let posted = receiver.until_posted(3).await;
    assert!(posted.iter().all(|posted| posted.key() == posted_key(&notice)), "one key for all attempts");
    assert!(posted.iter().all(|other| other.body == posted[0].body), "and one body");

    // The receiver is mended, and an operator sends the letter back.
    app.tell(&format!("/v1/dead-letters/{}/redrive", letter["id"].as_str().unwrap()), &json!({})).await;
    until_sent(&app).await;
    assert_eq!(receiver.until_posted(4).await[3].key(), posted_key(&notice));
    app.stop().await;
}

fn posted_key(notice: &Value) -> &str {
    notice["event_id"].as_str().unwrap()
}

async fn a_refusal_is_final(db: TestDb) {
    let receiver = Webhooks::open([Reply::Status(422)]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let letter = until_letter(&app).await;
    assert_eq!((&letter["reason"], &letter["attempts"]), (&json!("refused"), &json!(1)));
    until_notice(&app, "failed").await;
    receiver.until_posted(1).await;
    app.stop().await;
}

async fn a_receiver_that_asks_for_time_gets_it(db: TestDb) {
    let receiver = Webhooks::open([Reply::Later(429, 1)]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let notice = until_notice(&app, "pending").await;
    assert_eq!(until_inbox(&app, &notice, "retrying").await["attempts"], 1);
    until_sent(&app).await;
    let posted = receiver.until_posted(2).await;
    assert!(posted[1].at - posted[0].at >= Duration::from_secs(1), "{:?}", posted[1].at - posted[0].at);
    app.stop().await;
}

async fn no_answer_in_time_is_unknown_and_left_alone_if_told_so(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    let flags = ["--handler-timeout", "200ms", "--notify-repeat-unknown", "false"];
    let app = App::start_with(&db, &by_webhook(&receiver, &flags)).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let letter = until_letter(&app).await;
    assert_eq!(letter["reason"], "outcome-unknown");
    let notice = until_notice(&app, "unknown").await;
    assert!(notice["last_error"].as_str().unwrap().contains("200ms"), "{notice}");
    assert_eq!(inbox_row(&app, &notice).await["state"], "dead");
    receiver.until_posted(1).await;
    app.stop().await;
}

async fn no_answer_in_time_is_unknown_until_the_repeat_is_answered(db: TestDb) {
    let receiver = Webhooks::open([Reply::Hold]).await;
    // The repeat waits long enough for the doubt to be seen.
    let flags = ["--handler-timeout", "200ms", "--retry-base", "1s", "--retry-cap", "1s"];
    let app = App::start_with(&db, &by_webhook_at_leisure(&receiver.url, &flags)).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let notice = until_notice(&app, "unknown").await;
    assert_eq!(inbox_row(&app, &notice).await["state"], "retrying");
    let (notice, row) = until_sent(&app).await;
    assert_eq!((&notice["last_error"], &row["attempts"]), (&Value::Null, &json!(2)));
    let posted = receiver.until_posted(2).await;
    assert_eq!(posted[0].key(), posted[1].key());
    app.stop().await;
}

async fn a_doubt_stays_though_later_attempts_fail(db: TestDb) {
    let receiver = Webhooks::open([504, 500, 400].map(Reply::Status)).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    assert_eq!(until_letter(&app).await["reason"], "refused");
    receiver.until_posted(3).await;
    until_notice(&app, "unknown").await;
    app.stop().await;
}

async fn a_receiver_that_is_away_has_surely_got_nothing(db: TestDb) {
    // A port that was free a moment ago.
    let receiver = Webhooks::open([]).await;
    let url = receiver.url.clone();
    drop(receiver);
    let flags = ["--notify-repeat-unknown", "false", "--retry-base", "1s"];
    let app = App::start_with(&db, &by_webhook_at_leisure(&url, &flags)).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let notice = until_notice(&app, "pending").await;
    assert!(notice["last_error"].as_str().unwrap().contains("cannot connect"), "{notice}");
    assert_eq!(inbox_row(&app, &notice).await["state"], "retrying");
    app.stop().await;
}

async fn calls_are_made_at_once_but_not_too_many(db: TestDb) {
    const ORDERS: usize = 12;
    let receiver = Webhooks::open([Reply::Hold; ORDERS]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &["--outside-calls", "4"])).await;
    app.tell("/v1/consumers/notifications/pause", &json!({})).await;
    for _ in 0..ORDERS {
        app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    }
    app.tell("/v1/consumers/notifications/resume", &json!({})).await;
    receiver.until_posted(4).await;
    // No more are claimed than are under way.
    app.eventually_list("/v1/inbox?state=processing", 4).await;
    app.eventually_list("/v1/notifications?state=sending", 4).await;
    receiver.let_go();
    app.eventually_list("/v1/notifications?state=sent", ORDERS).await;
    assert_eq!(receiver.most_at_once(), 4);
    assert_eq!(receiver.posted().len(), ORDERS);
    app.stop().await;
}

async fn the_log_takes_over_what_another_channel_left(db: TestDb) {
    let receiver = Webhooks::open([Reply::Status(400)]).await;
    let app = App::start_with(&db, &by_webhook(&receiver, &[])).await;
    app.place_and_wait("alice", &[("WIDGET-A", 1)]).await;
    let letter = until_letter(&app).await;
    app.stop().await;
    let app = App::start(&db).await;
    app.tell(&format!("/v1/dead-letters/{}/redrive", letter["id"].as_str().unwrap()), &json!({})).await;
    let (notice, _) = until_sent(&app).await;
    assert_eq!((&notice["channel"], &notice["last_error"]), (&json!("log"), &Value::Null));
    app.stop().await;
}

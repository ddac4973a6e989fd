//! The calls that tests make on a server, in or out of process.

use reqwest::{Client, RequestBuilder, StatusCode};
use serde_json::{Value, json};

use super::eventually;

pub struct Api {
    pub url: String,
    pub client: Client,
}

impl Api {
    pub fn new(url: String) -> Self {
        Self { url, client: Client::new() }
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.url))
    }

    pub fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(body)
    }

    pub fn put(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.put(format!("{}{path}", self.url)).json(body)
    }

    /// POSTs what must succeed and returns what it answers.
    pub async fn tell(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).send().await.unwrap();
        assert!(response.status().is_success(), "POST {path}: {}", response.status());
        response.json().await.unwrap()
    }

    /// GETs JSON that must be there.
    pub async fn read(&self, path: &str) -> Value {
        let response = self.get(path).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "GET {path}");
        response.json().await.unwrap()
    }

    /// GETs a list and waits until it has `count` rows.
    pub async fn eventually_list(&self, path: &str, count: usize) -> Vec<Value> {
        eventually(&format!("{count} rows at {path}"), || async {
            let rows = self.read(path).await["data"].as_array().unwrap().clone();
            (rows.len() == count).then_some(rows)
        })
        .await
    }

    /// Waits until the broker can be worked with; the embedded queue always can.
    pub async fn until_connected(&self) {
        let up = async || (self.read("/v1/health").await["broker"]["status"] == "up").then_some(());
        eventually("a broker that is up", up).await;
    }

    pub async fn put_stock(&self, sku: &str, on_hand: i64) {
        let request = self.put(&format!("/v1/stock/{sku}"), &json!({ "on_hand": on_hand }));
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
    }

    /// (on_hand, reserved)
    pub async fn stock(&self, sku: &str) -> (i64, i64) {
        let stock = self.read(&format!("/v1/stock/{sku}")).await;
        (stock["on_hand"].as_i64().unwrap(), stock["reserved"].as_i64().unwrap())
    }

    /// Places an order and does not wait for its outcome.
    pub async fn place(&self, customer: &str, items: &[(&str, i64)]) -> Value {
        self.tell("/v1/orders", &order(customer, items)).await
    }

    pub async fn place_and_wait(&self, customer: &str, items: &[(&str, i64)]) -> Value {
        let response =
            self.post("/v1/orders", &order(customer, items)).header("prefer", "wait=20").send().await.unwrap();
        assert_eq!(response.status(), StatusCode::CREATED);
        response.json().await.unwrap()
    }
}

/// The body of an order.
pub fn order(customer: &str, items: &[(&str, i64)]) -> Value {
    let items: Vec<Value> = items.iter().map(|(sku, quantity)| json!({ "sku": sku, "quantity": quantity })).collect();
    json!({ "customer_id": customer, "items": items })
}

output "storage" {
  description = "The section `storage` of a run's configuration."
  value = {
    public_root     = "gs://${google_storage_bucket.public.name}/runs"
    private_root    = "gs://${google_storage_bucket.private.name}/runs"
    ledger          = "gs://${google_storage_bucket.ledger.name}"
    keys            = "gsm://${var.keys_project}/${var.key_prefix}"
    releases        = "gs://${google_storage_bucket.releases.name}"
    rollback_anchor = one([for bucket in google_storage_bucket.rollback_anchor : "gs://${bucket.name}"])
  }
}

output "service_accounts" {
  description = "Google accounts by group, for the overlay gke."
  value       = { for group, account in google_service_account.step : group => account.email }
}

# The buckets. Public, private and ledger are separate: a right on one gives no right on another.

resource "google_storage_bucket" "public" {
  name                        = "${var.project}-fedemb-public"
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = true
  }
}

# Deleting a user must delete: no versions, no soft delete.
resource "google_storage_bucket" "private" {
  name                        = "${var.project}-fedemb-private"
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = false
  }

  soft_delete_policy {
    retention_duration_seconds = 0
  }

  # Data of runs only; docs/cluster/reference.md#expiry lists what may expire.
  lifecycle_rule {
    condition {
      age            = var.private_days
      matches_prefix = ["runs/"]
    }
    action {
      type = "Delete"
    }
  }
}

# Records are created once and stay. Retention binds everybody, owners of the project included, and
# once it is locked nobody can shorten it.
resource "google_storage_bucket" "ledger" {
  name                        = "${var.project}-fedemb-ledger"
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  retention_policy {
    retention_period = var.ledger_retention_days * 86400
    is_locked        = var.lock_ledger
  }

  lifecycle {
    prevent_destroy = true
  }
}

# Rollback anchor: markers that the ledger is compared with. It is in a separate project, whose owners
# cannot restore ledger and keys to an older state.
resource "google_storage_bucket" "rollback_anchor" {
  count                       = var.rollback_anchor_project == null ? 0 : 1
  project                     = var.rollback_anchor_project
  name                        = coalesce(var.rollback_anchor_bucket, "${var.project}-fedemb-rollback-anchor")
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  retention_policy {
    retention_period = var.ledger_retention_days * 86400
    is_locked        = var.lock_ledger
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_storage_bucket" "releases" {
  name                        = "${var.project}-fedemb-releases"
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = true
  }
}

# Google lets whoever views the project read a new bucket, and whoever edits it write there. In these
# only its owners keep that right.
locals {
  closed = merge(
    {
      private  = google_storage_bucket.private
      ledger   = google_storage_bucket.ledger
      releases = google_storage_bucket.releases
    },
    { for bucket in google_storage_bucket.rollback_anchor : "rollback_anchor" => bucket },
  )
  given_by_google = {
    for pair in setproduct(
      concat(["private", "ledger", "releases"], var.rollback_anchor_project == null ? [] : ["rollback_anchor"]),
      ["legacyBucketOwner", "legacyBucketReader", "legacyObjectOwner", "legacyObjectReader"],
    ) : "${pair[0]}/${pair[1]}" => { store = pair[0], role = pair[1] }
  }
}

resource "google_storage_bucket_iam_binding" "given_by_google" {
  for_each = local.given_by_google
  bucket   = local.closed[each.value.store].name
  role     = "roles/storage.${each.value.role}"
  members  = ["projectOwner:${local.closed[each.value.store].project}"]
}

# The key store: Secret Manager in a project of its own. A key is version 1 of its secret; it is
# never in a bucket, so no version, backup or soft delete keeps a destroyed one.
resource "google_project_service" "secret_manager" {
  project            = var.keys_project
  service            = "secretmanager.googleapis.com"
  disable_on_destroy = false
}

resource "google_secret_manager_secret" "signing" {
  for_each  = local.signing_roles
  project   = var.keys_project
  secret_id = local.secret_ids["signing/${each.key}"]

  labels = {
    role = each.key
  }

  replication {
    auto {}
  }

  depends_on = [google_project_service.secret_manager]
}

resource "google_secret_manager_secret" "policy" {
  for_each  = var.policy_ids
  project   = var.keys_project
  secret_id = local.secret_ids["policy/${each.key}"]

  replication {
    auto {}
  }

  # Without it nobody under the policy can be told apart as before: no run of it starts again.
  lifecycle {
    prevent_destroy = true
  }

  depends_on = [google_project_service.secret_manager]
}

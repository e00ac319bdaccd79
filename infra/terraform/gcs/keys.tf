# Rights on keys. Names of reservation keys are not known beforehand, so rights go by the kind
# of key, with which the names of its secrets begin. The trainer destroys keys of reservations and
# no others: a policy's key and the marks of its ledger outlive every run.

data "google_project" "keys" {
  project_id = var.keys_project
}

locals {
  key_permissions = {
    read    = ["secretmanager.versions.access"]
    create  = ["secretmanager.versions.access", "secretmanager.versions.add"]
    destroy = ["secretmanager.versions.access", "secretmanager.versions.destroy"]
  }
  # A condition may have twelve logical operators at most.
  of_kinds = {
    for name, granted in local.keys : name => join(" || ", [
      for kind in granted.kinds :
      "resource.name.startsWith(\"projects/${data.google_project.keys.number}/secrets/${var.key_prefix}-${kind}-\")"
    ])
  }
}

resource "google_project_iam_custom_role" "keys" {
  for_each    = local.key_permissions
  project     = var.keys_project
  role_id     = "fedembKeys${title(each.key)}"
  title       = "fedemb: ${each.key} keys"
  permissions = each.value
}

resource "google_project_iam_member" "keys" {
  for_each = local.keys
  project  = var.keys_project
  role     = google_project_iam_custom_role.keys[each.value.right].name
  member   = local.member[each.value.group]

  condition {
    title      = "keys of ${join(", ", each.value.kinds)}"
    expression = local.of_kinds[each.key]
  }
}

# secrets.create is checked on the project itself, where a condition on names cannot hold.
resource "google_project_iam_custom_role" "keys_new" {
  project     = var.keys_project
  role_id     = "fedembKeysNew"
  title       = "fedemb: make a secret"
  permissions = ["secretmanager.secrets.create"]
}

resource "google_project_iam_member" "keys_new" {
  for_each = { for group, rights in local.groups : group => rights if contains(values(rights.keys), "create") }
  project  = var.keys_project
  role     = google_project_iam_custom_role.keys_new.name
  member   = local.member[each.key]
}

resource "google_secret_manager_secret_iam_member" "signing" {
  for_each  = local.signing
  project   = var.keys_project
  secret_id = google_secret_manager_secret.signing[each.value.role].secret_id
  role      = "roles/secretmanager.secretAccessor"
  member    = local.member[each.value.group]
}

# Rights on keys. Reservation keys have names that nobody knows beforehand, so their rights are on
# the project, with a condition that leaves out every signing key.

data "google_project" "keys" {
  project_id = var.keys_project
}

locals {
  not_signing = join(" && ", [
    for role in local.signing_roles :
    "!resource.name.startsWith(\"projects/${data.google_project.keys.number}/secrets/${local.secret_ids["signing/${role}"]}\")"
  ])
  key_permissions = {
    read    = ["secretmanager.versions.access"]
    create  = ["secretmanager.versions.access", "secretmanager.secrets.create", "secretmanager.versions.add"]
    destroy = ["secretmanager.versions.access", "secretmanager.versions.destroy"]
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
  for_each = { for group, rights in local.groups : group => rights if rights.keys != "none" }
  project  = var.keys_project
  role     = google_project_iam_custom_role.keys[each.value.keys].name
  member   = local.member[each.key]

  condition {
    title      = "no signing key"
    expression = local.not_signing
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
  for_each = { for group, rights in local.groups : group => rights if rights.keys == "create" }
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

# Everything here follows from ../../rights.yaml; nothing is granted by hand.

locals {
  groups = yamldecode(file("${path.module}/../../rights.yaml")).groups

  # Names of secrets as components/fedemb/keys/secret_manager.py makes them.
  signing_roles = toset([
    "policy", "ledger", "plan", "pretrain", "partition", "trainer", "evaluate", "audit", "report",
    "gate", "release",
  ])
  secret_ids = {
    for name in concat(
      [for role in local.signing_roles : "signing/${role}"],
      [for policy in var.policy_ids : "policy/${policy}"],
    ) : name => "${var.key_prefix}-${split("/", name)[0]}-${sha256(name)}"
  }

  # group/folder -> rights, for folders of the private root.
  private = merge([
    for group, rights in local.groups : {
      for folder, right in rights.private : "${group}/${folder}" => {
        group  = group
        folder = folder
        right  = right
      }
    }
  ]...)

  # group/right -> kinds of keys, signing keys apart.
  keys = merge([
    for group, rights in local.groups : {
      for right in toset(values(rights.keys)) : "${group}/${right}" => {
        group = group
        right = right
        kinds = [for kind, given in rights.keys : kind if given == right]
      }
    }
  ]...)

  signing = merge([
    for group, rights in local.groups : {
      for role in rights.signing : "${group}/${role}" => { group = group, role = role }
    }
  ]...)

  member = { for group, account in google_service_account.step : group => "serviceAccount:${account.email}" }

  # Conditions: an object of a folder below any run of the private root, or the folder's index.
  in_folder = {
    for key, item in local.private :
    key => join(" || ", [
      "resource.name.extract(\"/objects/{run}/${item.folder}/\") != \"\"",
      "resource.name.endsWith(\"/${item.folder}.tree\")",
    ])
  }
}

resource "google_service_account" "step" {
  for_each     = merge(local.groups, { run = null })
  account_id   = "fedemb-${each.key}"
  display_name = each.key == "run" ? "fedemb: drives runs" : "fedemb: ${each.value.step}"
}

resource "google_service_account_iam_member" "workload_identity" {
  for_each           = google_service_account.step
  service_account_id = each.value.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project}.svc.id.goog[${var.namespace}/fedemb-${each.key}]"
}

# ---- roles: the predefined ones join rights that must stay apart ----------------------------------

resource "google_project_iam_custom_role" "get" {
  role_id     = "fedembGet"
  title       = "fedemb: read objects"
  permissions = ["storage.objects.get"]
}

resource "google_project_iam_custom_role" "list" {
  role_id     = "fedembList"
  title       = "fedemb: list names, which must be granted on a whole bucket"
  permissions = ["storage.objects.list"]
}

resource "google_project_iam_custom_role" "append" {
  role_id     = "fedembAppend"
  title       = "fedemb: create and read objects, never replace or delete"
  permissions = ["storage.objects.create", "storage.objects.get", "storage.objects.list"]
}

resource "google_project_iam_custom_role" "write" {
  role_id = "fedembWrite"
  title   = "fedemb: create, read, replace and delete objects"
  permissions = [
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.multipartUploads.abort",
    "storage.multipartUploads.create",
  ]
}

# ---- public root, releases, ledger ---------------------------------------------------------------

resource "google_storage_bucket_iam_member" "public" {
  for_each = local.member
  bucket   = google_storage_bucket.public.name
  role     = "roles/storage.objectUser"
  member   = each.value
}

resource "google_storage_bucket_iam_member" "releases" {
  for_each = { for group, rights in local.groups : group => rights if rights.releases == "create" }
  bucket   = google_storage_bucket.releases.name
  role     = google_project_iam_custom_role.append.name
  member   = local.member[each.key]
}

resource "google_storage_bucket_iam_member" "releases_read" {
  for_each = { for group, rights in local.groups : group => rights if rights.releases == "read" }
  bucket   = google_storage_bucket.releases.name
  role     = "roles/storage.objectViewer"
  member   = local.member[each.key]
}

resource "google_storage_bucket_iam_member" "ledger_append" {
  for_each = { for group, rights in local.groups : group => rights if rights.ledger == "append" }
  bucket   = google_storage_bucket.ledger.name
  role     = google_project_iam_custom_role.append.name
  member   = local.member[each.key]
}

resource "google_storage_bucket_iam_member" "ledger_read" {
  for_each = { for group, rights in local.groups : group => rights if rights.ledger == "read" }
  bucket   = google_storage_bucket.ledger.name
  role     = "roles/storage.objectViewer"
  member   = local.member[each.key]
}

resource "google_project_iam_custom_role" "rollback_anchor" {
  count       = var.rollback_anchor_project == null ? 0 : 1
  project     = var.rollback_anchor_project
  role_id     = "fedembRollbackAnchor"
  title       = "fedemb: add and read marks, never replace or delete"
  permissions = ["storage.objects.create", "storage.objects.get", "storage.objects.list"]
}

resource "google_storage_bucket_iam_member" "rollback_anchor" {
  for_each = {
    for group, rights in local.groups : group => rights
    if rights.rollback_anchor == "append" && var.rollback_anchor_project != null
  }
  bucket = google_storage_bucket.rollback_anchor[0].name
  role   = google_project_iam_custom_role.rollback_anchor[0].name
  member = local.member[each.key]
}

# The data owners begin policies, waive, approve and rotate keys; the pipeline is not asked.
resource "google_storage_bucket_iam_member" "ledger_owners" {
  for_each = var.data_owners
  bucket   = google_storage_bucket.ledger.name
  role     = google_project_iam_custom_role.append.name
  member   = each.key
}

resource "google_storage_bucket_iam_member" "rollback_anchor_owners" {
  for_each = var.rollback_anchor_project == null ? toset([]) : var.data_owners
  bucket   = google_storage_bucket.rollback_anchor[0].name
  role     = google_project_iam_custom_role.rollback_anchor[0].name
  member   = each.key
}

resource "google_storage_bucket_iam_member" "public_owners" {
  for_each = var.data_owners
  bucket   = google_storage_bucket.public.name
  role     = "roles/storage.objectUser"
  member   = each.key
}

resource "google_storage_bucket_iam_member" "releases_owners" {
  for_each = var.data_owners
  bucket   = google_storage_bucket.releases.name
  role     = "roles/storage.objectViewer"
  member   = each.key
}

# ---- private root --------------------------------------------------------------------------------

resource "google_storage_bucket_iam_member" "private" {
  for_each = local.private
  bucket   = google_storage_bucket.private.name
  member   = local.member[each.value.group]
  role = {
    read  = google_project_iam_custom_role.get.name
    write = google_project_iam_custom_role.write.name
  }[each.value.right]

  condition {
    title      = "only ${each.value.folder}"
    expression = local.in_folder[each.key]
  }
}

resource "google_storage_bucket_iam_member" "private_list" {
  for_each = toset([for item in values(local.private) : item.group])
  bucket   = google_storage_bucket.private.name
  role     = google_project_iam_custom_role.list.name
  member   = local.member[each.key]
}

resource "google_storage_bucket_iam_member" "private_owners" {
  for_each = var.data_owners
  bucket   = google_storage_bucket.private.name
  role     = "roles/storage.objectUser"
  member   = each.key
}

resource "google_storage_bucket_iam_member" "private_input" {
  for_each = {
    for pair in setproduct(var.private_input_buckets, keys(local.groups)) :
    "${pair[0]}/${pair[1]}" => { bucket = pair[0], group = pair[1] }
    if contains(local.groups[pair[1]].input, "private")
  }
  bucket = each.value.bucket
  role   = "roles/storage.objectViewer"
  member = local.member[each.value.group]
}

# These buckets may be of another project, where a custom role of this one does not count.
resource "google_storage_bucket_iam_member" "private_input_names" {
  for_each = {
    for pair in setproduct(var.private_input_buckets, keys(local.groups)) :
    "${pair[0]}/${pair[1]}" => { bucket = pair[0], group = pair[1] }
    if contains(local.groups[pair[1]].input, "names")
  }
  bucket = each.value.bucket
  role   = "roles/storage.legacyBucketReader"
  member = local.member[each.value.group]
}

resource "google_storage_bucket_iam_member" "public_input" {
  for_each = {
    for pair in setproduct(var.public_input_buckets, keys(local.groups)) :
    "${pair[0]}/${pair[1]}" => { bucket = pair[0], group = pair[1] }
    if contains(local.groups[pair[1]].input, "public")
  }
  bucket = each.value.bucket
  role   = "roles/storage.objectViewer"
  member = local.member[each.value.group]
}

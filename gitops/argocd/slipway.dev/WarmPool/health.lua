-- Argo CD's health of a WarmPool. The conditions follow kstatus: Reconciling and Stalled are present only while they are
-- True. A pool whose pods are all claimed is refilled, which is no fault: Exhausted is not read.
--
--   being deleted                          Progressing
--   no status, or of an older generation   Progressing
--   spec.suspend                           Suspended
--   Stalled                                Degraded
--   Reconciling, or Ready=Unknown          Progressing
--   Ready                                  Healthy
--   Ready=False                            Degraded
local function progressing(message)
  return { status = "Progressing", message = message }
end

if obj.metadata.deletionTimestamp ~= nil then
  return progressing("being deleted: its idle pods go first")
end
local status = obj.status
if status == nil or status.conditions == nil then
  return progressing("waiting for the operator")
end
local generation = obj.metadata.generation
if generation ~= nil and status.observedGeneration ~= generation then
  return progressing("waiting for the operator to read the new spec")
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end
local function is_true(type)
  return conditions[type] ~= nil and conditions[type].status == "True"
end
local function message_of(type)
  local condition = conditions[type]
  return condition and (condition.message or condition.reason) or ""
end

if obj.spec ~= nil and obj.spec.suspend then
  return { status = "Suspended", message = "suspended by spec.suspend" }
end
if is_true("Stalled") then
  return { status = "Degraded", message = message_of("Stalled") }
end
if is_true("Reconciling") then
  return progressing(message_of("Reconciling"))
end
if is_true("Ready") then
  return { status = "Healthy", message = message_of("Ready") }
end
if conditions.Ready ~= nil and conditions.Ready.status == "False" then
  return { status = "Degraded", message = message_of("Ready") }
end
return progressing(message_of("Ready"))

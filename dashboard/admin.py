"""Users in the operators' admin: Django's own, with an e-mail address for a user name."""

from typing import TYPE_CHECKING, ClassVar

from django.contrib import admin
from django.contrib.auth import admin as auth_admin
from django.contrib.auth.forms import AdminUserCreationForm, UserChangeForm

from dashboard.models import User

if TYPE_CHECKING:
    _UserAdmin = auth_admin.UserAdmin[User]
    _CreationForm = AdminUserCreationForm[User]
    _ChangeForm = UserChangeForm[User]
else:
    _UserAdmin = auth_admin.UserAdmin
    _CreationForm = AdminUserCreationForm
    _ChangeForm = UserChangeForm


class CreationForm(_CreationForm):
    class Meta:
        model = User
        fields = ("email", "name")
        field_classes: ClassVar[dict[str, type]] = {}


class ChangeForm(_ChangeForm):
    class Meta:
        model = User
        fields = (
            "email",
            "password",
            "name",
            "is_active",
            "is_staff",
            "is_superuser",
            "groups",
            "user_permissions",
        )
        field_classes: ClassVar[dict[str, type]] = {}


@admin.register(User)
class UserAdmin(_UserAdmin):
    form = ChangeForm
    add_form = CreationForm
    list_display = ("email", "name", "is_staff", "is_active", "last_login")
    list_filter = ("is_staff", "is_superuser", "is_active")
    search_fields = ("email", "name")
    ordering = ("email",)
    readonly_fields = ("last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("email", "password", "name")}),
        (
            "Permissions",
            {"fields": ("is_active", "is_staff", "is_superuser", "groups", "user_permissions")},
        ),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = (
        (
            None,
            {
                "classes": ("wide",),
                "fields": ("email", "name", "usable_password", "password1", "password2"),
            },
        ),
    )
